"""Cases, peers, timing, checks and reports. torch is imported by the modules that compute."""
