"""The checks of `elastane doctor` on a node: `facts` reads, and `rules` derives the findings."""
