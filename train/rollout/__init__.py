"""Rollouts: who generates responses (`backend`), and what a training batch is made of (`collect`)."""
