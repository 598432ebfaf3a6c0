"""From the command line and the environment to one checked configuration of an agent."""
