"""`rollfleet conformance`: a live fleet checked against what is promised of it, with a report as evidence.

`checks/` is pure: what is asked, and what is judged of the answers. The contract suite runs the same against the
simulator and real vLLM. The rest carries the questions to engines and the answers back.
"""
