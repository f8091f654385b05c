"""Ray on Slurm: from an allocation to a running cluster, the driver in it, and nothing left behind."""
