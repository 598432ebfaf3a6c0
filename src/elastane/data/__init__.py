"""Elastic data: an order that anybody can evaluate anywhere, and the job's place in it."""
