"""/v1/responses over the same engine as chat.

    ResponsesRequest + kept items --items, request--> ChatCompletionRequest --Converter--> Work
    Chunks --chat.reader--> Said --transcript--> events --making--> a stream, or the response that the last one carries

`store` keeps what has ended, `background` what is being made while nobody waits.
"""
