#!/bin/busybox sh
# libxl runs this when a disk is attached or detached (`script=` in its entry). A backend in user space says by
# itself that it is ready; the one in the kernel is told here which device it serves.
be=$XENBUS_PATH
[ "$1" = add ] || exit 0
device=$(xenstore-read $be/params)
if [ -b "$device" ]; then
  xenstore-write $be/physical-device "$(stat -c '%t:%T' $device)" || exit 1
  xenstore-write $be/hotplug-status connected
fi
exit 0
