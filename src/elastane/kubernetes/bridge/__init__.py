"""What an operator and the coordinator of its ElasticJob exchange, and who carries it."""
