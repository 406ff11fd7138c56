"""What both sides of a push need beside the wire's words: calls that may hang, and vLLM-Ascend's transports.

All that we use of vLLM-Ascend in a push is imported in this package and nowhere else (devtools/ascend_rules.py).
"""
