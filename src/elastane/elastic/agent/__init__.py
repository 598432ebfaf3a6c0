"""Agents in the user's own process. Source: torch.distributed.elastic.agent."""
