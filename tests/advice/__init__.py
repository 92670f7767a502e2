"""What the tools advise, followed literally: each test breaks a thing, does what is printed, and sees it work."""
