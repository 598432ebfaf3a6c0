"""What `elastane doctor` finds on a node: facts are read, and findings follow from them."""
