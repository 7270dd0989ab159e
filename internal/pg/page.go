package pg

// ScannedPage returns the rows of a page: of those that a query looked at, at most limit that match. The query numbers
// what it looks at, at most scan rows, and has returned one more match than limit if there are more. last is the row
// after which the next page begins, or nil at the end: a page may be short, or empty, and not be the last.
func ScannedPage[R any](rows []R, limit, scan int, look func(*R) (n int, matches bool)) (page []R, last *R) {
	for i := range rows {
		n, matches := look(&rows[i])
		switch {
		case len(page) == limit:
			return page, &page[limit-1]
		case matches:
			page = append(page, rows[i])
		}
		if n == scan {
			return page, &rows[i]
		}
	}
	return page, nil
}
