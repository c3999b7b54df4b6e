"""Compiling for hardware that this machine does not have: does it fit, what does it cost, how is it scheduled."""
