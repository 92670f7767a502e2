"""Code that the agents of learners and syncers share: access to a run, outages of store and bus, and health."""
