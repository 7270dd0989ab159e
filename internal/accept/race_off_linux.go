//go:build !race

package accept

func noteForRaceDetector(uintptr) {}
