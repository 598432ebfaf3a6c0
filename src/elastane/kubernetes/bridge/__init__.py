"""The exchange between an operator and the coordinator of its ElasticJob.

`messages` is pure and for both sides: the names and forms of directive and report. `bridge` is the
coordinator's side, which reads the directive and writes the report.
"""
