"""What each policy and batch size would make of recorded or synthetic arrivals: the real Scheduler in virtual time."""
