"""The lab: what the paper asks at large scale, asked at small scale, with real gradients in virtual time.

`setting` says what one run is, `training` runs it with the library's own learners and syncer, `experiments` are lists
of settings and what is concluded from their rows.
"""
