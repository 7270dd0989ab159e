package retry

import "errors"

// Join is errors.Join, but says each text once: of servers that fail alike, one answer is enough.
func Join(errs ...error) error {
	var different []error
	said := map[string]bool{}
	for _, err := range errs {
		if err != nil && !said[err.Error()] {
			said[err.Error()] = true
			different = append(different, err)
		}
	}
	return errors.Join(different...)
}
