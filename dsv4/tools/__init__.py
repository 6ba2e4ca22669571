"""Plain functions behind the commands: inspect, check, plan, convert. No printing here."""
