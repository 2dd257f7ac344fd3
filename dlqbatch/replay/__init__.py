"""Send chosen dead messages back by a plan: freeze it, show its risks, apply it in steps, abort it."""
