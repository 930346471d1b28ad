"""A validator of OpenAPI documents reads that of the control API, and finds nothing: generators of clients take it."""

import json
import unittest

from support import need_package, spile


class Document(unittest.TestCase):
    def setUp(self):
        need_package("openapi_spec_validator")
        self.document = json.loads(spile("schema", "api").stdout)

    def errors(self):
        from openapi_spec_validator import OpenAPIV31SpecValidator

        return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
                for error in OpenAPIV31SpecValidator(self.document).iter_errors()]

    def test_it_is_valid(self):
        self.assertEqual(self.errors(), [])

    def test_what_was_wrong_once_is_found(self):
        answers = self.document["paths"]["/v1/disks"]["get"]["responses"]
        del answers["200"]["description"]
        self.assertTrue(self.errors())


if __name__ == "__main__":
    unittest.main()
