"""The trainer, from one laptop core to a cluster. Read `train.loop` first."""
