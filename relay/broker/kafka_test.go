//go:build kafka

package broker_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/relay/broker"
	"stampede/relay/feed"
)

const (
	topic      = "orders"
	partitions = 4
)

// kafkaBroker is a single broker of its own, in KRaft mode. `task test:kafka` writes the class path of its jars.
type kafkaBroker struct {
	addr, config, classes string
	cmd                   *exec.Cmd
}

func startKafka(t *testing.T) *kafkaBroker {
	t.Helper()
	classes, err := os.ReadFile("testdata/kafka/target/classpath")
	require.NoError(t, err, "run task test:kafka")
	folder := t.TempDir()
	ports := make([]string, 2)
	for i := range ports {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		_, ports[i], _ = net.SplitHostPort(listener.Addr().String())
		require.NoError(t, listener.Close())
	}
	k := &kafkaBroker{
		addr: "127.0.0.1:" + ports[0], config: filepath.Join(folder, "server.properties"),
		classes: strings.TrimSpace(string(classes)),
	}
	require.NoError(t, os.WriteFile(k.config, fmt.Appendf(nil, `process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:%[2]s
listeners=PLAINTEXT://127.0.0.1:%[1]s,CONTROLLER://127.0.0.1:%[2]s
advertised.listeners=PLAINTEXT://127.0.0.1:%[1]s
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs=%[3]s
num.partitions=1
offsets.topic.replication.factor=1
`, ports[0], ports[1], filepath.Join(folder, "logs")), 0o600))
	format := k.java("kafka.tools.StorageTool", "format", "--cluster-id", "AAAAAAAAAAAAAAAAAAAAAA", "--config", k.config)
	out, err := format.CombinedOutput()
	require.NoError(t, err, string(out))
	k.start(t)
	t.Cleanup(k.kill)
	k.createTopic(t)
	return k
}

// createTopic returns when every partition has a leader: for some seconds after their creation a busy broker does not
// know them. The relay tries again then.
func (k *kafkaBroker) createTopic(t *testing.T) {
	t.Helper()
	client := k.client(t)
	create := kmsg.NewPtrCreateTopicsRequest()
	made := kmsg.NewCreateTopicsRequestTopic()
	made.Topic, made.NumPartitions, made.ReplicationFactor = topic, partitions, 1
	create.Topics = append(create.Topics, made)
	answer, err := create.RequestWith(t.Context(), client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(answer.Topics[0].ErrorCode))
	testkit.Eventually(t, time.Minute, "leaders of all partitions", func() bool {
		answer, err := kmsg.NewPtrMetadataRequest().RequestWith(t.Context(), client)
		if err != nil || len(answer.Topics) != 1 || len(answer.Topics[0].Partitions) != partitions {
			return false
		}
		for _, p := range answer.Topics[0].Partitions {
			if p.ErrorCode != 0 || p.Leader < 0 {
				return false
			}
		}
		return true
	})
}

func (k *kafkaBroker) client(t *testing.T, options ...kgo.Opt) *kgo.Client {
	t.Helper()
	client, err := kgo.NewClient(append(options, kgo.SeedBrokers(k.addr))...)
	require.NoError(t, err)
	t.Cleanup(client.Close)
	return client
}

func (k *kafkaBroker) java(args ...string) *exec.Cmd {
	cmd := exec.Command("java", append([]string{"-Xmx256m", "-cp", k.classes}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return cmd
}

func (k *kafkaBroker) start(t *testing.T) {
	t.Helper()
	k.cmd = k.java("kafka.Kafka", k.config)
	require.NoError(t, k.cmd.Start())
	testkit.Eventually(t, 2*time.Minute, "Kafka", func() bool { return k.client(t).Ping(t.Context()) == nil })
}

func (k *kafkaBroker) kill() {
	_ = k.cmd.Process.Kill()
	_ = k.cmd.Wait()
}

// read returns all messages of the topic, by partition.
func (k *kafkaBroker) read(t *testing.T, events int) [][]*kgo.Record {
	t.Helper()
	consumer := k.client(t, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	all := make([][]*kgo.Record, partitions)
	for n := 0; n < events; {
		fetches := consumer.PollFetches(ctx)
		require.NoError(t, fetches.Err())
		for _, m := range fetches.Records() {
			all[m.Partition] = append(all[m.Partition], m)
			n++
		}
	}
	return all
}

func TestKafkaGetsEventsOfSubjectInOrder(t *testing.T) {
	k := startKafka(t)
	p, err := broker.NewTopic([]string{k.addr}, topic, "stampede-test")
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close()) }()
	const subjects, versions = 500, 4
	begun := time.Now()
	var senders errgroup.Group
	senders.SetLimit(p.InFlight())
	for n := range subjects {
		senders.Go(func() error {
			for version := range versions {
				subject := fmt.Sprintf("order-%d", n)
				err := p.Send(context.Background(), &feed.Event{
					ID: subject + "." + strconv.Itoa(version), Subject: subject, Body: fmt.Appendf(nil, `{"version":%d}`, version),
				})
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, senders.Wait())
	t.Logf("%.0f events/s", subjects*versions/time.Since(begun).Seconds())
	next := map[string]int{}
	used := 0
	for _, partition := range k.read(t, subjects*versions) {
		if len(partition) > 0 {
			used++
		}
		for _, m := range partition {
			subject := string(m.Key)
			require.Contains(t, m.Headers, kgo.RecordHeader{
				Key: "_watermill_message_uuid", Value: fmt.Appendf(nil, "%s.%d", subject, next[subject]),
			})
			require.JSONEq(t, fmt.Sprintf(`{"version":%d}`, next[subject]), string(m.Value), subject)
			next[subject]++
		}
	}
	require.Len(t, next, subjects)
	require.Equal(t, partitions, used, "partitions")
}

func TestKafkaOutageIsError(t *testing.T) {
	k := startKafka(t)
	p, err := broker.NewTopic([]string{k.addr}, topic, "stampede-test")
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close()) }()
	send := func() error {
		return p.Send(context.Background(), &feed.Event{ID: "o.2", Subject: "o", Body: []byte("{}")})
	}
	require.NoError(t, send())
	k.kill()
	require.Error(t, send())
	fresh, err := broker.NewTopic([]string{k.addr}, topic, "stampede-test")
	require.NoError(t, err)
	defer func() { require.NoError(t, fresh.Close()) }()
	require.Error(t, fresh.Send(t.Context(), &feed.Event{ID: "o.2", Subject: "o", Body: []byte("{}")}))
	k.start(t)
	testkit.Eventually(t, time.Minute, "a delivery", func() bool { return send() == nil })
}
