"""Launching from Python. Source: torch.distributed.launcher."""

from elastane.elastic.launcher.api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
