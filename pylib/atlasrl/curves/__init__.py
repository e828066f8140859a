"""Curves of runs: load -> align -> judge -> report. Needs neither torch nor Ray nor verl."""
