"""Logs; later metrics and traces."""
