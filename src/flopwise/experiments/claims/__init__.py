"""One file per experiment, each with its `EXPERIMENT`; a file's name with dashes is the experiment's."""
