"""How bytes move between trainer ranks and engine ranks: process groups of their own, apart from the default one."""
