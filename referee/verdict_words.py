"""The words of reports and records: verdicts, and times beside eager's."""

# Verdicts.
CORRECT = "correct"
WRONG = "wrong"
ERROR = "error"
TIME_LIMIT = "time limit"
INTERRUPTED = "interrupted"
LEFT_OUT = "left out"
# A solution's time beside eager's.
FASTER = "faster"
SLOWER = "slower"
TIE = "a tie"
TOO_NOISY = "too noisy"
