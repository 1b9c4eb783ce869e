"""Exact data: which sample a number stands for, how it is read ahead, and what a checkpoint has to say of it."""
