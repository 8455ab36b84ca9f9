"""Moving state: lanes, fetching weights, draining gradients, and the timeline."""
