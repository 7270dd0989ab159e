package draw_test

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloudflare/circl/ecc/bls12381"
	"github.com/cloudflare/circl/ecc/bls12381/ff"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/draw"
)

func unhex(t testing.TB, text string) []byte {
	t.Helper()
	raw, err := hex.DecodeString(text)
	require.NoError(t, err)
	return raw
}

// beacons are rounds of drand quicknet, as its servers gave them out.
var beacons = map[int64]struct{ signature, randomness string }{
	42: {
		"95a9f9f5b231b7714de1553105d8ffdf3dcda24cfdb1e689319bccf79a9c8ce430a91b811fbfaf763900bc998b5d686a",
		"8ada64bae5c6c0f5540a6a13af56e663240edfbd2c76ac6a8f27671eb7259ce3",
	},
	43: {
		"a96a579010b3d2261959104b29b5b46685b3a6b6f6aae7304ef72d44fe7d44e667bcdd500935d7deb58a2b4d89419ea6",
		"c8f7c61c7024f8b45ffbf5be58b1f112a26be93c26f5461af9f8522233705dbb",
	},
	1000: {
		"b44679b9a59af2ec876b1a6b1ad52ea9b1615fc3982b19576350f93447cb1125e342b73a8dd2bacbe47e4b6b63ed5e39",
		"fe290beca10872ef2fb164d2aa4442de4566183ec51c56ff3cd603d930e54fdd",
	},
	657413: {
		"b713718a38ae728dfd477991af2822e08d2f305e47718cef9f7848ce4050e7be41076862b98fad56e91a6b85b89cd97b",
		"fc1873a13f3545aeade8401532ef5519920652eee6b0d2b19ca12643b87b3587",
	},
	12040883: {
		"929906c959032ab363c9f26570d215d66f5c06cb0c44fe508c12bb5839f04ec895bb6868e5b9ff13ab289bdb5266b394", "",
	},
	32281667: {
		"b0f5ae301358ff87a9d3dd539ed4a07c0148b1ab4f7b61a8ca43c7e9ca7ca9553e4faae9188deb30b2cd1a7f447e3e5b",
		"4fd2fc55983dbfa3f446d8a0bd56f16cc8c5e76afd1ec154b60d477cbabed13b",
	},
	32285085: {
		"81dbce51d584d90d618547f4b50391d53ace6f6b9aeb8fb67e1879427af9d0310ac0ec6f519271d9a313ee84b378d416", "",
	},
	32285086: {
		"a64d99fd7fa3e48912be7209c7b69c72c88fc5224be2516949b6f29f3a4b7e3fa069dd58b2bbb4bf2c34ae61ef631a44", "",
	},
}

func TestBeaconsOfQuicknet(t *testing.T) {
	t.Parallel()
	for round, b := range beacons {
		signature := unhex(t, b.signature)
		seed, err := draw.BeaconSeed(round, signature)
		require.NoError(t, err, round)
		require.Equal(t, draw.Seed(sha256.Sum256(signature)), seed)
		if b.randomness != "" {
			require.Equal(t, b.randomness, hex.EncodeToString(seed[:]))
		}
		for other := range beacons {
			if other != round {
				_, err := draw.BeaconSeed(other, signature)
				require.ErrorIs(t, err, draw.ErrBeacon, "%d for %d", round, other)
			}
		}
	}
}

// outside is a point of the curve y² = x³ + 4 that is not in the subgroup of the signatures: x = 4.
func outside(t *testing.T) []byte {
	t.Helper()
	field := new(big.Int).SetBytes(ff.FpOrder())
	require.NotNil(t, new(big.Int).ModSqrt(big.NewInt(4*4*4+4), field), "it is on the curve")
	raw := make([]byte, 48)
	raw[0], raw[47] = 0x80, 4
	require.Error(t, new(bls12381.G1).SetBytes(raw), "it is in the subgroup")
	return raw
}

func TestOtherSignaturesAreRefused(t *testing.T) {
	t.Parallel()
	const round = 1000
	genuine := unhex(t, beacons[round].signature)
	var point bls12381.G1
	require.NoError(t, point.SetBytes(genuine))
	infinity := make([]byte, 48)
	infinity[0] = 0xC0
	negated := bytes.Clone(genuine)
	negated[0] ^= 0x20
	for name, signature := range map[string][]byte{
		// The same round of fastnet, which has its key in G2 too but hashes otherwise.
		"of fastnet": unhex(t, "b09eacd45767c4d58306b98901ad0d6086e2663766f3a4ec71d00cf26f0f49eaf248abc7151c60cf419c4e8b37e80412"),
		// Round 3311596 of the default chain, whose signatures are in G2.
		"of the default chain": unhex(t, "a696b9409ababce45749c3a4ec369074453dd4a79967734e1390d969c8ad8d98897d217b9121e92c"+
			"8ddebbddda8d92f900e3bd6bf9deb166863b1a19390d743f82774001487594c5c09e581db7365f02b70a2c8cc41ce32446ef08e4890c4754"),
		"uncompressed":          point.Bytes(),
		"the other root":        negated,
		"at infinity":           infinity,
		"infinity uncompressed": append([]byte{0x40}, make([]byte, 95)...),
		"outside the subgroup":  outside(t),
		"of one megabyte":       bytes.Repeat(genuine, 1<<20/48),
		"a byte too short":      genuine[:47],
		"a byte too long":       append(bytes.Clone(genuine), 0),
		"empty":                 nil,
		"zeros":                 make([]byte, 48),
		"x not reduced":         append([]byte{0x9f}, bytes.Repeat([]byte{0xff}, 47)...),
	} {
		_, err := draw.BeaconSeed(round, signature)
		require.ErrorIs(t, err, draw.ErrBeacon, name)
	}
	for bit := range 8 * len(genuine) {
		changed := bytes.Clone(genuine)
		changed[bit/8] ^= 1 << (bit % 8)
		_, err := draw.BeaconSeed(round, changed)
		require.ErrorIs(t, err, draw.ErrBeacon, "bit %d", bit)
	}
	for _, other := range []int64{0, -1, 1, round - 1, round + 1, math.MaxInt64, math.MinInt64} {
		_, err := draw.BeaconSeed(other, genuine)
		require.ErrorIs(t, err, draw.ErrBeacon, other)
	}
}

var genesis = time.Unix(1692803367, 0)

func TestRoundAtIsTheFirstFromATimeOn(t *testing.T) {
	t.Parallel()
	for after, want := range map[time.Duration]int64{
		-100 * 365 * 24 * time.Hour: 1, -1: 1, 0: 1, 1: 2, time.Second: 2, 3*time.Second - 1: 2, 3 * time.Second: 2,
		3*time.Second + 1: 3, 4 * time.Second: 3, 6 * time.Second: 3, 3_000_000 * time.Second: 1_000_001,
	} {
		require.Equal(t, want, draw.RoundAt(genesis.Add(after)), after)
	}
	require.Equal(t, genesis.UTC(), draw.RoundTime(1))
	for year := 2023; year < 9999; year += 7 {
		at := time.Date(year, 12, 31, 1, 2, 3, 4, time.UTC)
		round := draw.RoundAt(at)
		require.False(t, draw.RoundTime(round).Before(at))
		require.True(t, draw.RoundTime(round-1).Before(at))
	}
}

func TestRoundsFollowTheFreeze(t *testing.T) {
	t.Parallel()
	closes, freeze := genesis.Add(time.Hour), 60*time.Second
	first := draw.RoundAt(closes.Add(freeze))
	for frozen, want := range map[time.Duration][]int64{
		0:             {first},
		freeze - 1:    {first},
		freeze:        {first, first + 20}, // the round may be known
		2*freeze - 1:  {first, first + 20},
		2 * freeze:    {first, first + 20, first + 40},
		3*freeze - 1:  {first, first + 20, first + 40},
		3 * freeze:    nil,
		100 * freeze:  nil,
		-100 * freeze: {first},
	} {
		require.Equal(t, want, draw.Rounds(closes, freeze, closes.Add(frozen)), frozen)
	}
	require.Len(t, draw.Rounds(closes, draw.FreezeMax, closes.Add(2*draw.FreezeMax)), 3)
	odd := draw.Rounds(closes.Add(time.Millisecond), draw.FreezeMin, closes.Add(2*draw.FreezeMin))
	require.Len(t, odd, 2)
	require.Less(t, odd[0], odd[1])
}

func someParties(n int) (parties []draw.Party) {
	for i := range n {
		secret := someLeaf(int64(i))
		commitment := sha256.Sum256(secret[:])
		parties = append(parties, draw.Party{Name: strings.Repeat("p", i+1), Commitment: commitment[:], Secret: secret[:]})
	}
	return parties
}

func TestSeedOfParties(t *testing.T) {
	t.Parallel()
	goods, root := uuid.New(), sha256.Sum256([]byte("a list"))
	parties := someParties(3)
	var secrets, commitments []byte
	for _, p := range parties {
		secrets, commitments = append(secrets, p.Secret...), append(commitments, p.Commitment...)
	}
	bound := slices.Concat([]byte("stampede draw seed 2"), goods[:], root[:], commitments, secrets)
	seeds := map[draw.Seed]bool{}
	seedOf := func(version int, goods uuid.UUID, root []byte, parties []draw.Party) draw.Seed {
		seed, err := draw.PartiesSeed(version, goods, root, parties)
		require.NoError(t, err)
		require.False(t, seeds[seed], "another draw has another seed")
		seeds[seed] = true
		return seed
	}
	require.Equal(t, draw.Seed(sha256.Sum256(append([]byte("stampede draw seed"), secrets...))),
		seedOf(draw.FirstVersion, goods, root[:], parties))
	require.Equal(t, draw.Seed(sha256.Sum256(bound)), seedOf(draw.Version, goods, root[:], parties))
	seedOf(draw.Version, uuid.New(), root[:], parties)
	otherRoot := root
	otherRoot[31] ^= 1
	seedOf(draw.Version, goods, otherRoot[:], parties)
	parties[0], parties[1] = parties[1], parties[0]
	seedOf(draw.FirstVersion, goods, root[:], parties)
	seedOf(draw.Version, goods, root[:], parties)
	seedOf(draw.Version, goods, root[:], someParties(16))

	_, err := draw.PartiesSeed(draw.Version+1, goods, root[:], parties)
	require.ErrorContains(t, err, "version 3 is not known")

	type parts = []draw.Party
	for want, change := range map[string]func(parts) parts{
		"0 parties, want 1 to 16":      func(parts) parts { return nil },
		"17 parties":                   func(parts) parts { return someParties(17) },
		`"pp" has not revealed`:        func(p parts) parts { p[1].Secret = nil; return p },
		`secret of "p" is not what`:    func(p parts) parts { p[0].Secret[31]++; return p },
		`secret of "pp" is not what`:   func(p parts) parts { p[1].Secret = p[1].Secret[:31]; return p },
		`"ppp" repeats the commitment`: func(p parts) parts { p[0].Name = "ppp"; return parts{p[1], p[0], p[0]} },
		"a name of 1 to 64 bytes":      func(p parts) parts { p[2].Name = ""; return p },
		"1 to 64 bytes":                func(p parts) parts { p[0].Name = strings.Repeat("n", 65); return p },
		"a commitment of 32":           func(p parts) parts { p[2].Commitment = p[2].Commitment[:31]; return p },
	} {
		require.NoError(t, someParties(1)[0].Verify())
		_, err := draw.PartiesSeed(draw.Version, goods, root[:], change(someParties(3)))
		require.ErrorIs(t, err, draw.ErrParties)
		require.ErrorContains(t, err, want)
	}
}

func sorted(all []draw.Ranked) []draw.Ranked {
	all = append([]draw.Ranked{}, all...)
	slices.SortFunc(all, func(a, b draw.Ranked) int {
		return cmp.Or(bytes.Compare(a.Score[:], b.Score[:]), cmp.Compare(a.Place, b.Place))
	})
	return all
}

func TestLowestIsTheBeginningOfAllSorted(t *testing.T) {
	t.Parallel()
	for range 300 {
		seed := draw.Seed(someLeaf(rand.Int64()))
		var all []draw.Ranked
		for place := range rand.Int64N(500) {
			score := seed.Score(someLeaf(place))
			if rand.IntN(50) == 0 && place > 0 { // equal scores are ranked by place
				score = all[rand.Int64N(place)].Score
			}
			all = append(all, draw.Ranked{Place: place, Score: score})
		}
		if rand.IntN(2) == 0 {
			slices.Reverse(all) // the order in which they come does not matter
		}
		want := sorted(all)
		above := draw.Score{}
		if len(want) > 0 && rand.IntN(2) == 0 {
			above = want[rand.IntN(len(want))].Score
		}
		want = slices.DeleteFunc(want, func(r draw.Ranked) bool { return bytes.Compare(r.Score[:], above[:]) <= 0 })
		k := 1 + rand.IntN(100)
		lowest := draw.NewLowest(k, above)
		for i, one := range all {
			lowest.Add(one.Place, one.Score)
			if i%97 == 0 {
				lowest.Ranks() // may be asked for in between
			}
		}
		require.Equal(t, want[:min(k, len(want))], append([]draw.Ranked{}, lowest.Ranks()...))
	}
}

// chiSquared compares how often each hundredth of the ranks falls on each hundredth of the places with even chances.
func chiSquared(ranked []draw.Ranked) (sum float64) {
	const parts = 100
	var found [parts][parts]float64
	for rank, r := range ranked {
		found[r.Place*parts/int64(len(ranked))][rank*parts/len(ranked)]++
	}
	expected := float64(len(ranked)) / (parts * parts)
	for _, row := range found {
		for _, n := range row {
			sum += (n - expected) * (n - expected) / expected
		}
	}
	return sum
}

// Of even chances, the sum has the χ² distribution with (100-1)² = 9801 degrees of freedom, because all sums of rows
// and columns are given: its mean is 9801 and its standard deviation √(2·9801) = 140. The bounds are four of these on
// each side, which even chances miss for one seed in 16,000; the seed is fixed, so the result is always the same.
func TestRanksDoNotDependOnPlaces(t *testing.T) {
	t.Parallel()
	const entries, low, high = 1_000_000, 9801 - 4*140.0, 9801 + 4*140.0
	seed := draw.Seed(someLeaf(-2))
	all := make([]draw.Ranked, entries)
	for place := range all {
		all[place] = draw.Ranked{Place: int64(place), Score: seed.Score(someLeaf(int64(place)))}
	}
	sum := chiSquared(sorted(all))
	t.Logf("χ² = %.0f", sum)
	require.Greater(t, sum, low, "more even than by chance")
	require.Less(t, sum, high)

	// It is found if the first hundredth of the entries has two chances each.
	for place := range entries / 100 {
		if second := seed.Score(someLeaf(entries + int64(place))); bytes.Compare(second[:], all[place].Score[:]) < 0 {
			all[place].Score = second
		}
	}
	require.Greater(t, chiSquared(sorted(all)), high)
}

// A Ranking has the ranks that Lowest has, of each item on its own.
func TestRankingIsThatOfTheScores(t *testing.T) {
	t.Parallel()
	for range 100 {
		seed := draw.Seed(someLeaf(rand.Int64()))
		size := rand.Int64N(300)
		letters := [][]byte{{0}, []byte("abB")}[rand.IntN(2)]
		ranking := draw.NewRanking(seed, size)
		var records []draw.Record
		want := map[byte]*draw.Lowest{}
		for place := range size {
			var record draw.Record
			leaf := someLeaf(place)
			copy(record[1:], leaf[:])
			record[0] = letters[rand.IntN(len(letters))]
			if place > 0 && rand.IntN(20) == 0 { // equal scores are ranked by place
				record = records[rand.Int64N(place)]
			}
			records = append(records, record)
			ranking.Add(record)
			if want[record[0]] == nil {
				want[record[0]] = draw.NewLowest(int(size), draw.Score{})
			}
			want[record[0]].Add(place, seed.Score(record.Leaf()))
		}
		entries, err := ranking.Sort(func(place int64) (draw.Record, error) { return records[place], nil })
		require.NoError(t, err)
		require.Len(t, entries, len(want))
		next := int64(0)
		for _, letter := range letters { // their order is that of the items
			if want[letter] == nil {
				continue
			}
			for rank, r := range want[letter].Ranks() {
				require.Equal(t, r.Place, int64(ranking.Place(next)))
				require.Equal(t, rank, int(ranking.Rank(r.Place)))
				next++
			}
		}
		require.Equal(t, size, next)
	}
}

// Entries whose scores begin alike are ranked by the whole score.
func TestRankingComparesWholeScores(t *testing.T) {
	t.Parallel()
	var alike draw.Record
	low, high := draw.Record{1: 1}, draw.Record{1: 2}
	seed := draw.Seed{}
	if first, second := seed.Score(low.Leaf()), seed.Score(high.Leaf()); string(first[:]) > string(second[:]) {
		low, high = high, low
	}
	ranking := draw.NewRanking(seed, 2)
	ranking.Add(alike)
	ranking.Add(alike)
	_, err := ranking.Sort(func(place int64) (draw.Record, error) { return []draw.Record{high, low}[place], nil })
	require.NoError(t, err)
	require.Equal(t, []uint32{1, 0}, []uint32{ranking.Rank(0), ranking.Rank(1)})

	ranking = draw.NewRanking(seed, 2)
	ranking.Add(alike)
	ranking.Add(alike)
	failed := errors.New("no list")
	_, err = ranking.Sort(func(int64) (draw.Record, error) { return alike, failed })
	require.ErrorIs(t, err, failed)
}
