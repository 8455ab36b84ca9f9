"""The engine: step.py is the flow of a step on one page, session.py its lifetime."""
