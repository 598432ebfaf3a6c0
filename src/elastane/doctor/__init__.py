"""The checks of `elastane doctor`, on a node and between nodes.

`facts` reads this node, and `rules` derives the findings. With `--nodes`, the nodes meet
(`meeting`), measure the network between them (`probes`), and `network_rules` derives the findings.
"""
