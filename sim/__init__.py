"""Synthetic worlds with known truth, and the studies run in them. Nothing stands here yet."""
