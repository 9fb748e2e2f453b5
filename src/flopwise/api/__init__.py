"""One file per verb: each joins the rooms into what a user asks for. The CLI parses, calls these and renders."""
