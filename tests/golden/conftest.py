"""The scripts here need torch; pytest would import them for their doctests."""

collect_ignore = ["golden_cases.py", "make_golden.py", "make_golden_mtp.py", "make_golden_quantized.py"]
