"""Claims about GPUs, each measured on the machine at hand, with a verdict that may be 'refuted here'.

An experiment is one file in `claims/`; it is found by being there. `experiment.py` says what it is made of, `rows.py` what it
measures, `verdict.py` how it judges, `bench.py` what it measures with. `flopwise lab all --quick` must end within two minutes on
two CPU cores, so an experiment has about five seconds in quick mode.
"""
