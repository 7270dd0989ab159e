-- Freezes the list of the draw of the sale $1: $2 entries with the root $3. The time $4 is not proved (confirm.sql).
UPDATE draws SET entries = $2, root = $3, frozen_at = $4 WHERE sale_id = $1
