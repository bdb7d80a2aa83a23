"""An engine on several ranks: processes that each compute a part of the model. The leader also schedules."""
