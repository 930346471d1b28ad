#!/bin/busybox sh
# What libxl runs when a disk comes or goes (`script=` in a disk's words). A backend in user space says by
# itself that it is ready; one in the kernel is told here which device it shall serve.
be=$XENBUS_PATH
[ "$1" = add ] || exit 0
device=$(xenstore-read $be/params)
if [ -b "$device" ]; then
  xenstore-write $be/physical-device "$(stat -c '%t:%T' $device)" || exit 1
  xenstore-write $be/hotplug-status connected
fi
exit 0
