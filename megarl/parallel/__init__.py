"""The grid of ranks as integers, and the process groups of one grid."""
