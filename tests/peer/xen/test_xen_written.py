"""The last test of a run: ends the host in order, and looks at what it has left in the images.

What front ends have seen of each image is compared with what is in it on the machine that runs the tests.
"""

from base import XenTest


class XenWritten(XenTest):
    def test_images_hold_what_front_ends_have_seen(self):
        if XenTest.running is None:
            self.skipTest("no test before this one has left a host with images that were written")
        XenTest.finish()
