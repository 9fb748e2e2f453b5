"""Watches a step run, on real or fake tensors: every op, every storage from birth to death. [torch]"""
