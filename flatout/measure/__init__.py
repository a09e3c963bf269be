"""What a run costs and what each optimisation gains, measured: every figure with its repeats and
its interval.
"""
