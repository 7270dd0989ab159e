package webhook

// IsPublic is for tests.
var IsPublic = isPublic
