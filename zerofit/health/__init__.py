"""Watchdog, anomaly detection, the out-of-memory report, signals."""
