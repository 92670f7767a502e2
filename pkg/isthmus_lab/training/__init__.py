"""The lab: the paper's questions, asked at small scale, with real gradients in virtual time.

`setting` describes one run. `training` runs it with the library's own learners and syncer. `experiments` has the lists
of settings, by experiment.
"""
