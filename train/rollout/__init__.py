"""Rollouts: who generates responses (`backend`), what makes a batch of them (`collect`)."""
