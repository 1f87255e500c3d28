"""For all tests: one thread, and property tests that draw the same examples every time."""

import torch

# Test processes run side by side; more threads than cores crawl.
torch.set_num_threads(1)

try:
    from hypothesis import settings
except ImportError:  # then the tests that need it say so themselves
    pass
else:
    settings.register_profile("ci", derandomize=True, deadline=None)
    settings.register_profile("explore", max_examples=1000, deadline=None)
    settings.load_profile("ci")
