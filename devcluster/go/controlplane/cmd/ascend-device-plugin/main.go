// Command ascend-device-plugin stands in for the Ascend device plugin on a machine without NPUs: it advertises a number
// of devices to the kubelet and tells a container which ones it got by ASCEND_VISIBLE_DEVICES, as the real one does.
// There is no device node behind an id; the kubelet's scheduling, limits and exhaustion are real.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	registerTimeout = 10 * time.Second
	pollInterval    = 200 * time.Millisecond
)

type plugin struct {
	api.UnimplementedDevicePluginServer
	prefix string
	count  int
	done   <-chan struct{} // closed when this server is stopping, so that open streams end
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

// ListAndWatch sends the devices once: a stand-in's devices never change their health.
func (p *plugin) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	devices := make([]*api.Device, p.count)
	for i := range devices {
		devices[i] = &api.Device{ID: fmt.Sprintf("%s-%d", p.prefix, i), Health: api.Healthy}
	}
	if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
		return err
	}
	select {
	case <-stream.Context().Done():
	case <-p.done:
	}
	return nil
}

func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		ordinals, err := p.ordinals(container.DevicesIds)
		if err != nil {
			return nil, err
		}
		log.Printf("allocated %s", ordinals)
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{
			Envs: map[string]string{"ASCEND_VISIBLE_DEVICES": ordinals},
		})
	}
	return response, nil
}

// ordinals turns device ids into the sorted list of numbers that Ascend's runtime reads.
func (p *plugin) ordinals(ids []string) (string, error) {
	numbers := make([]int, 0, len(ids))
	for _, id := range ids {
		number, err := strconv.Atoi(strings.TrimPrefix(id, p.prefix+"-"))
		if err != nil || number < 0 || number >= p.count {
			return "", fmt.Errorf("unknown device %q", id)
		}
		numbers = append(numbers, number)
	}
	sort.Ints(numbers)
	words := make([]string, len(numbers))
	for i, number := range numbers {
		words[i] = strconv.Itoa(number)
	}
	return strings.Join(words, ","), nil
}

func register(ctx context.Context, kubelet, endpoint, resource string) error {
	connection, err := grpc.NewClient("unix://"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	_, err = api.NewRegistrationClient(connection).Register(ctx, &api.RegisterRequest{
		Version: api.Version, Endpoint: endpoint, ResourceName: resource, Options: &api.DevicePluginOptions{},
	})
	return err
}

// waitChanged blocks until the kubelet's socket is another one (a restarted kubelet forgets its plugins) or until ours is
// gone (a starting kubelet empties the folder), or until the context ends.
func waitChanged(ctx context.Context, kubelet, ours string, before os.FileInfo) {
	for sleep(ctx) {
		now, err := os.Stat(kubelet)
		if err != nil || !os.SameFile(before, now) || !now.ModTime().Equal(before.ModTime()) {
			return
		}
		if _, err := os.Stat(ours); err != nil {
			return
		}
	}
}

// waitFor blocks until the file is there; nil when the context ended first.
func waitFor(ctx context.Context, path string) os.FileInfo {
	for {
		if info, err := os.Stat(path); err == nil {
			return info
		}
		if !sleep(ctx) {
			return nil
		}
	}
}

func sleep(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(pollInterval):
		return true
	}
}

// serve runs one registration: from a kubelet's socket appearing until that socket is replaced.
func serve(ctx context.Context, directory, resource, prefix string, count int) error {
	kubelet := filepath.Join(directory, "kubelet.sock")
	endpoint := strings.ReplaceAll(resource, "/", "_") + ".sock"
	ours := filepath.Join(directory, endpoint)
	before := waitFor(ctx, kubelet)
	if before == nil {
		return nil
	}
	if err := os.Remove(ours); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", ours)
	if err != nil {
		return err
	}
	done := make(chan struct{})
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, &plugin{prefix: prefix, count: count, done: done})
	go server.Serve(listener) //nolint:errcheck // it ends with Stop, below
	defer server.Stop()
	defer close(done)
	if err := register(ctx, kubelet, endpoint, resource); err != nil {
		log.Printf("the kubelet did not take the registration: %v", err)
		sleep(ctx)
		return nil
	}
	log.Printf("registered %d of %s", count, resource)
	waitChanged(ctx, kubelet, ours, before)
	return nil
}

func main() {
	directory := flag.String("directory", "/var/lib/kubelet/device-plugins", "the kubelet's folder of plugin sockets")
	resource := flag.String("resource", "huawei.com/Ascend910", "the extended resource to advertise")
	prefix := flag.String("prefix", "Ascend910", "device ids are PREFIX-0 and so on")
	count := flag.Int("count", 16, "how many devices")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	for ctx.Err() == nil {
		if err := serve(ctx, *directory, *resource, *prefix, *count); err != nil {
			log.Fatal(err)
		}
	}
}
