"""The Ray controller: placement, worker groups, the step, the loop. Read ``step.py`` first."""
