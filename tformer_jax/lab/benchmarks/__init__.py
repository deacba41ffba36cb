"""Measurements that anyone can repeat, and the other systems that they compare with."""
